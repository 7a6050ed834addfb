"""Upload a file as a table and query it with SQL: python docs/examples/tables.py"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lakebed

with lakebed.connect() as lake, tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "orders.csv")
    file.write_text("id,customer,total\n1,ann,10\n2,bob,5\n3,ann,2\n")
    committed = lake.ticks.push(file, project="shop", key="id")
    print(f"{committed.rows_inserted} rows")

    query = "select customer, sum(total) as spent from bronze.shop.orders group by 1 order by 1"
    for row in lake.sql(query).to_pylist():
        print(f"{row['customer']}: {row['spent']}")
