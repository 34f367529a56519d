"""Plans of training calls on made-up clusters."""

from megatron_tree.plan import Shape, default_topology, place, plan_training

DGX, ETHERNET = default_topology("nccl"), default_topology("gloo")
MHA, GQA4, GQA8 = Shape(32, 32, 128, 128), Shape(32, 8, 128, 128), Shape(64, 8, 128, 128)
MQA = Shape(16, 1, 128, 128)


def training(world, shape, topology=ETHERNET, hosts=None, **options):
    placement = place(topology, list(hosts or range(world)))
    options = {"batch": 1, "seq_len": 1024 * world, "bytes_per_word": 2, **options}
    return plan_training(world, shape, topology=topology, placement=placement, **options)


def ring(plan):
    return [next(c for c in table if c.schedule == "ring" and c.ulysses_size == 1) for table in plan.candidates]
