"""Where samples come from. A source puts checked samples into the batcher and is never stopped by a bad one."""
