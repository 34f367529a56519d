"""What `launch/train_gpt.py` is made of: options, data, model, checkpoints, reports and the training loop."""
