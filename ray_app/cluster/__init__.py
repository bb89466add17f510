"""What `polythink up`, `join` and `down` start and end on this machine: Ray, MLflow and the Serve application."""
