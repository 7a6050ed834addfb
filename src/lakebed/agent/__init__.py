"""The agent: samples in, an fsynced disk queue, batches out to any collector, nothing lost in between."""
