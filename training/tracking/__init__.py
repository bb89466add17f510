"""What is told to people and to MLflow: progress, metrics, the run, the registered model."""
