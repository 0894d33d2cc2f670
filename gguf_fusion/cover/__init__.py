"""Cover trees: one expert's next-symbol law, marginal over all ways its tokens can continue the text."""
