"""Language models: encoders and decoders, from Hugging Face folders on disk."""
