"""Jobs from QUEUED to their end: the store, who may start next, and the dispatcher that keeps store, Ray Jobs and run directories in agreement."""
