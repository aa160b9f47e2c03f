"""What `dango sim` can be asked: each module here is one experiment, with one command line."""
