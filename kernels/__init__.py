"""Every operation of the model that is worth a kernel, as plain functions over tensors."""
