"""What ranks send each other: averages of what is protected, and what they agree on before."""
