"""One step on the device: `inputs` turns a plan into tensors, `runner` runs plans in launch order on its own thread."""
