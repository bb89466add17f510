"""What a plan is made from: how large a model is and what a step of it costs. Loads without torch."""
