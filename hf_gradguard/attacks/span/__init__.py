"""The span attack, which finds tokens whose layer inputs lie in the span of a weight gradient."""
