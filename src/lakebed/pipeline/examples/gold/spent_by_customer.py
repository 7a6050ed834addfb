"""What each customer has spent, cancelled orders aside: only customers that a change concerns are summed again."""
# mypy: ignore-errors
# ruff: noqa: UP037, F821

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakebed import pipeline as lp


@lp.table(
    keys=["customer_id"],
    incremental="merge",
    expect={"spent >= 0": "fail", "name is not null": "warn"},
    comment="What each customer has spent, cancelled orders aside.",
)
def spent_by_customer(
    changed_orders: lp.Changes["silver.orders"],
    changed_customers: lp.Changes["silver.customers"],
    orders: lp.Table["silver.orders"],
    customers: lp.Table["silver.customers"],
) -> DataFrame:
    """One row for each customer whose orders or name changed; everybody else's row stays."""
    touched = changed_orders.select("customer_id").union(changed_customers.select("customer_id")).distinct()
    counted = orders.filter("status <> 'cancelled'").join(touched, on="customer_id", how="left_semi")
    sums = counted.groupBy("customer_id").agg(F.count("order_id").alias("orders"), F.sum("total").alias("spent"))
    return (
        customers.join(touched, on="customer_id", how="left_semi")
        .join(sums, on="customer_id", how="left")
        .select(
            "customer_id",
            "name",
            "country",
            F.coalesce("orders", F.lit(0)).cast("long").alias("orders"),
            F.coalesce("spent", F.lit(0)).cast("decimal(18,2)").alias("spent"),
        )
    )
