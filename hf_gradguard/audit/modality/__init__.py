"""The former place of what is now in `hf_gradguard.data.images`."""
