"""Data and reward of the real-model recipes: `openr1_math` makes the prompts, `reward` scores the responses."""
