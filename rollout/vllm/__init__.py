"""The vLLM engine. Imports nothing here: vLLM's own processes import what they need of it (`scheduler`, `worker`)."""
