// The class ChunkTable; its methods are bound in several units.
#pragma once

#include <pybind11/pybind11.h>

#include "chunk/chunk_table.h"

namespace gemini {

using BoundTable = pybind11::class_<ChunkTable>;

void bind_chunk_steps(BoundTable& table);
void bind_chunk_queries(BoundTable& table);

}  // namespace gemini
