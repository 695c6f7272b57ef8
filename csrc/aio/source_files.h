// Files of others, read in the background and never written to: a checkpoint that serves as a tier.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/process_guard.h"

namespace gemini {

// Bytes of one file and where in memory they go; neither need be aligned.
struct SourcePart {
  int32_t file = 0;  // the index of its path
  int64_t offset = 0;
  void* destination = nullptr;
  int64_t nbytes = 0;
};

// Reads past the page cache: with O_DIRECT, through an aligned buffer for each thread, and where
// the file system has no O_DIRECT it drops what was read. A file that was changed since it was
// opened is refused: its weights would belong to two versions.
//
// Thread-safe. Memory must stay valid until its ticket is done. In a forked child every call but
// the destructor throws StateError.
class SourceFiles {
 public:
  using Ticket = uint64_t;  // never 0

  // Opens regular files, read-only. Throws IoError, StateError for none, and ThreadError.
  explicit SourceFiles(std::vector<std::string> paths, int num_threads = 4);
  ~SourceFiles();  // drops what has not started, waits for the rest
  SourceFiles(const SourceFiles&) = delete;
  SourceFiles& operator=(const SourceFiles&) = delete;

  // Starts to read. Throws StateError for a file that is not there, a negative range, or when
  // closed.
  [[nodiscard]] Ticket read(const std::vector<SourcePart>& parts);
  // Blocks until all parts are there, and throws the first error; once for each ticket.
  void wait(Ticket ticket);
  // Waits for what has started and closes the files. Idempotent.
  void close();

  [[nodiscard]] const std::vector<std::string>& paths() const noexcept { return paths_; }
  // Whether every file is read with O_DIRECT.
  [[nodiscard]] bool direct() const noexcept;

 private:
  struct File {
    int descriptor = -1;
    bool direct = false;
    struct stat opened = {};
  };
  struct Piece {
    Ticket ticket = 0;
    SourcePart part;
  };
  struct State;

  void open(const std::string& path);
  void stop() noexcept;
  void work();
  void read_piece(const SourcePart& part, char* buffer) const;
  void read_direct(const SourcePart& part, char* buffer) const;
  void read_buffered(const SourcePart& part) const;
  void require_unchanged(const SourcePart& part) const;

  ProcessGuard process_;
  std::vector<std::string> paths_;
  std::vector<File> files_;
  std::unique_ptr<State> state_;  // leaked in a forked child: its locks may be held there for ever
};

}  // namespace gemini
