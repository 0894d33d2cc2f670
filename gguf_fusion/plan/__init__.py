"""Planning: what a placement of experts needs and how fast it will be, before anything is loaded."""
