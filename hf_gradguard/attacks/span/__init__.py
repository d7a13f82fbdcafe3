"""The span attack: tokens whose layer inputs lie in the span of a weight gradient."""
