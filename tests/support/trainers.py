"""Short runs of Transformers' Trainer."""

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # Accelerate asks for them, nothing listens there
ARGUMENTS = {  # of a short run of Transformers' Trainer
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
    "optim": "adamw_torch",
    "adam_epsilon": 1e-5,
}
OFFLINE = ADDRESS | {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
