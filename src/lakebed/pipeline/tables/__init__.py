"""Tables in the open Delta format, written by Spark executors and committed through the store seam."""
