"""The HTTP routes: jobs, files, generation and OpenAI's, and what they stream. Loads without torch."""
