# Example: EX26, Launch
# Repair: an argument of the program's own instead of add_argument(...); the variables that srun and
#   mpirun set are set here, as neither starts this program
# Run: gemini run examples/documents/launch.py --dataset small
# Shows: the parser takes arguments of the program; launch, launch_from_torch, launch_from_slurm and
#   launch_from_openmpi say the same place of the process
import os
from unittest import mock

import gemini.compat as colossalai
from gemini.compat.core import global_context as gpc
from gemini.parallel.launch import shutdown

# get default parser
parser = colossalai.get_default_parser()

# if you want to add your own arguments
parser.add_argument("--dataset")

# parse arguments
args = parser.parse_args()
assert args.dataset == "small"

SLURM = dict(SLURM_PROCID="0", SLURM_NPROCS="1")
# The document's MPI_COMM_WORLD_RANK is read too.
OPENMPI = dict(OMPI_COMM_WORLD_LOCAL_RANK="0", MPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1")
CONFIG = dict(BATCH_SIZE=512)

for variables, launch, options in (
    ({}, colossalai.launch, dict(rank=args.rank, world_size=args.world_size, backend=args.backend)),
    ({}, colossalai.launch_from_torch, {}),
    (SLURM, colossalai.launch_from_slurm, dict(host="localhost", port=29500)),
    (OPENMPI, colossalai.launch_from_openmpi, dict(host="localhost", port=29500)),
):
    with mock.patch.dict(os.environ, variables):
        launch(config=CONFIG, **options)
    assert (gpc.get_global_rank(), gpc.config.BATCH_SIZE) == (0, 512)
    shutdown()
