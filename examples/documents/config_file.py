# Example: EX28, Define your configuration
# Repair: config.py is written to a temporary directory, where this program reads it
# Run: gemini run examples/documents/config_file.py
# Shows: features and hyper-parameters of a configuration file are in the global context
import tempfile
from pathlib import Path

import gemini.compat as colossalai
from gemini.compat.amp import AMP_TYPE
from gemini.compat.core import global_context as gpc

CONFIG = """
from gemini.compat.amp import AMP_TYPE

fp16 = dict(
    mode=AMP_TYPE.TORCH
)
BATCH_SIZE = 32
"""

with tempfile.TemporaryDirectory() as directory:
    config = Path(directory, "config.py")
    config.write_text(CONFIG)
    colossalai.launch_from_torch(config=str(config))

# access your parameter
print(gpc.config.BATCH_SIZE)
assert gpc.config.BATCH_SIZE == 32
assert gpc.config.fp16["mode"] is AMP_TYPE.TORCH
