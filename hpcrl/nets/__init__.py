"""Networks: torsos, recurrent cores and the actor-critic built from them."""
