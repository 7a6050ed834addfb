"""Send a batch of samples, then query it: python docs/examples/samples.py"""

from __future__ import annotations

import lakebed

with lakebed.connect() as lake:
    sent = lake.batches.send(
        [
            {"metric": "example_temperature", "value": 20.5, "labels": {"room": "kitchen"}},
            {"metric": "example_temperature", "value": 18.0, "labels": {"room": "cellar"}},
        ]
    )
    print("accepted:", sent)

    for row in lake.batches.query("example_temperature", match={"room": "cellar"}, last="1h").rows():
        print(row["room"], row["value"])
