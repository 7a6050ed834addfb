-- What each customer has spent, cancelled orders aside.
select
  c.customer_id,
  c.name,
  c.country,
  count(o.order_id) as orders,
  cast(coalesce(sum(o.total), 0) as decimal(18, 2)) as spent
from {{ ref('customers') }} c
left join {{ ref('orders') }} o on o.customer_id = c.customer_id and o.status <> 'cancelled'
group by c.customer_id, c.name, c.country
