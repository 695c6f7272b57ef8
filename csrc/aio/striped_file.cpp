#include "aio/striped_file.h"

#include <algorithm>

#include "common/bytes.h"
#include "common/error.h"

namespace gemini {

StripedFile::StripedFile(const std::vector<std::string>& dirs, int64_t nbytes, Options options,
                         IoHook* hook)
    : stripe_bytes_(options.stripe_bytes) {
  if (dirs.empty()) throw StateError("a file needs a directory");
  const int64_t each = share(nbytes, static_cast<int64_t>(dirs.size()));
  for (const std::string& dir : dirs) {
    files_.push_back(
        std::make_unique<UnlinkedFile>(dir, each, options.direct, options.reserve, hook));
    size_ += files_.back()->size();
  }
}

int64_t StripedFile::share(int64_t nbytes, int64_t files) const {
  return files == 1 ? nbytes : round_up(nbytes, files * stripe_bytes_) / files;
}

void StripedFile::grow(int64_t nbytes) {
  const int64_t each = share(nbytes, static_cast<int64_t>(files_.size()));
  int64_t size = 0;
  for (const auto& file : files_) {
    file->grow(each);
    size += file->size();
  }
  size_ = size;
}

StripedFile::Stretch StripedFile::locate(int64_t position, int64_t nbytes) const {
  const auto count = static_cast<int64_t>(files_.size());
  if (count == 1) return Stretch{0, position, std::min(nbytes, stripe_bytes_)};
  const int64_t stripe = position / stripe_bytes_;
  const int64_t within = position % stripe_bytes_;
  return Stretch{static_cast<int>(stripe % count), stripe / count * stripe_bytes_ + within,
                 std::min(nbytes, stripe_bytes_ - within)};
}

void StripedFile::close() noexcept {
  for (const auto& file : files_) file->close();
}

void StripedFile::discard(int64_t position, int64_t nbytes) {
  const bool single = files_.size() == 1;
  while (nbytes > 0) {
    const Stretch part = single ? Stretch{0, position, nbytes} : locate(position, nbytes);
    file(part.file).discard(part.offset, part.nbytes);
    position += part.nbytes;
    nbytes -= part.nbytes;
  }
}

std::vector<int> StripedFile::descriptors() const {
  std::vector<int> found;
  for (const auto& file : files_) found.push_back(file->fd());
  return found;
}

bool StripedFile::direct() const noexcept {
  return std::any_of(files_.begin(), files_.end(), [](const auto& file) { return file->direct(); });
}

bool StripedFile::can_discard() const noexcept {
  return std::all_of(files_.begin(), files_.end(),
                     [](const auto& file) { return file->can_discard(); });
}

bool StripedFile::in_memory() const noexcept {
  return std::all_of(files_.begin(), files_.end(),
                     [](const auto& file) { return file->in_memory(); });
}

std::string StripedFile::path() const {
  std::string path;
  for (const auto& file : files_) path += (path.empty() ? "" : ", ") + file->path();
  return path;
}

}  // namespace gemini
