"""Engine: models, contexts, sampling. Token ids only: no text, no HTTP."""
