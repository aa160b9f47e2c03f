"""Other designs, to hold Dango against. Only here has the simulator scheduling rules, and they are not ours."""
