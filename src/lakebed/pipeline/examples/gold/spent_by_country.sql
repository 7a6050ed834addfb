-- The same by country; reads the other table, so it is made after it.
select country, sum(orders) as orders, cast(sum(spent) as decimal(18, 2)) as spent
from {{ ref('spent_by_customer') }}
group by country
