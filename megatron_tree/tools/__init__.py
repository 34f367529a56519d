"""Programs around the core: benchmarks, calibration, an emulated cluster, checkpoints, a training loop, diagnosis."""
