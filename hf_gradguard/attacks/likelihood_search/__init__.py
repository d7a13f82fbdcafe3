"""A discrete search for the text that makes a message likeliest."""
