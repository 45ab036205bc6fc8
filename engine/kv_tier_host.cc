// The host tier: blocks in plain (or pinned) memory, moved by one worker thread in the order in
// which transfers were started, so that a Remove never overtakes the write before it.
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "engine/kv_tier.h"

namespace carryover {
namespace {

class HostTier : public KvTier {
 public:
  explicit HostTier(HostTierOptions options)
      : options_(std::move(options)), worker_([this] { Work(); }) {}

  ~HostTier() override {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
      queue_changed_.Signal();
    }
    worker_.join();
    for (auto& [id, image] : images_) Free(&image);
  }

  Tier tier() const override { return Tier::kHost; }

  absl::Status StartWrite(ImageId image, const KvImageHeader& header, const void* device,
                          Done done) override {
    const size_t bytes = ImageBytes(header);
    if (bytes > options_.budget_bytes - used_bytes_) {
      return absl::ResourceExhaustedError(absl::StrCat("host tier: an image of ", bytes,
                                                       " bytes is over its budget of ",
                                                       options_.budget_bytes));
    }
    used_bytes_ += bytes;
    sizes_[image] = bytes;
    Enqueue({.kind = Job::kWrite,
             .image = image,
             .header = EncodeKvImageHeader(header),
             .source = device,
             .bytes = header.payload_bytes,
             .done = std::move(done)});
    return absl::OkStatus();
  }

  void StartRead(ImageId image, const KvImageHeader& expected, void* device, Done done) override {
    Enqueue({.kind = Job::kRead,
             .image = image,
             .header = EncodeKvImageHeader(expected),
             .destination = device,
             .bytes = expected.payload_bytes,
             .done = std::move(done)});
  }

  void Remove(ImageId image) override {
    GiveBack(image);
    Enqueue({.kind = Job::kRemove, .image = image});
  }

  size_t used_bytes() const override { return used_bytes_; }
  size_t budget_bytes() const override { return options_.budget_bytes; }
  size_t ImageBytes(const KvImageHeader& header) const override {
    // The encoded header without encoding it: fixed fields, then what varies.
    return header.payload_bytes + sizeof(Image) + 256 + 32 * header.provenance.sources.size() +
           header.provenance.map.size() + 4 * header.tokens.size();
  }

  int Poll() override {
    std::deque<Job> finished;
    {
      MutexLock lock(&mutex_);
      finished.swap(finished_);
    }
    for (Job& job : finished) {
      if (job.kind == Job::kWrite && !job.result.ok()) GiveBack(job.image);
      if (job.done) job.done(std::move(job.result));
    }
    return static_cast<int>(finished.size());
  }

  void SetWakeup(std::function<void()> wakeup) override {
    MutexLock lock(&mutex_);
    wakeup_ = std::move(wakeup);
  }

 private:
  struct Image {
    std::string header;
    void* payload = nullptr;
    size_t bytes = 0;
    Digest checksum{};
  };

  struct Job {
    enum Kind { kWrite, kRead, kRemove } kind = kRemove;
    ImageId image = 0;
    std::string header;
    const void* source = nullptr;
    void* destination = nullptr;
    size_t bytes = 0;
    Done done;
    absl::Status result;
  };

  void Enqueue(Job job) {
    MutexLock lock(&mutex_);
    queue_.push_back(std::move(job));
    queue_changed_.Signal();
  }

  void GiveBack(ImageId image) {
    const auto it = sizes_.find(image);
    if (it == sizes_.end()) return;
    used_bytes_ -= it->second;
    sizes_.erase(it);
  }

  // The worker.
  void Work() {
    for (;;) {
      Job job;
      {
        MutexLock lock(&mutex_);
        while (queue_.empty() && !stopping_) queue_changed_.Wait(&mutex_);
        if (stopping_) return;
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      if (job.kind == Job::kRemove) {
        Drop(job.image);
        continue;
      }
      job.result = job.kind == Job::kWrite ? Write(&job) : Read(job);
      std::function<void()> wakeup;
      {
        MutexLock lock(&mutex_);
        finished_.push_back(std::move(job));
        wakeup = wakeup_;
      }
      if (wakeup) wakeup();
    }
  }

  absl::Status Write(Job* job) {
    Drop(job->image);
    Image image;
    image.header = std::move(job->header);
    image.bytes = job->bytes;
    image.payload = options_.alloc(image.bytes);
    if (image.payload == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("host tier: no memory for ", image.bytes, " bytes"));
    }
    absl::Status status = options_.download(image.payload, job->source, image.bytes);
    if (!status.ok()) {
      Free(&image);
      return status;
    }
    image.checksum = KvImageChecksum(image.header, image.payload, image.bytes);
    images_[job->image] = std::move(image);
    return absl::OkStatus();
  }

  absl::Status Read(const Job& job) {
    const auto it = images_.find(job.image);
    if (it == images_.end()) return absl::NotFoundError("host tier: no such image");
    const Image& image = it->second;
    if (image.header != job.header || image.bytes != job.bytes) {
      return absl::DataLossError("host tier: the image is of another block");
    }
    if (KvImageChecksum(image.header, image.payload, image.bytes) != image.checksum) {
      return absl::DataLossError("host tier: checksum differs");
    }
    return options_.upload(job.destination, image.payload, image.bytes);
  }

  void Drop(ImageId id) {
    const auto it = images_.find(id);
    if (it == images_.end()) return;
    Free(&it->second);
    images_.erase(it);
  }

  void Free(Image* image) {
    if (image->payload != nullptr) options_.release(image->payload, image->bytes);
    image->payload = nullptr;
  }

  const HostTierOptions options_;

  // Of the engine thread.
  size_t used_bytes_ = 0;
  std::unordered_map<ImageId, size_t> sizes_;

  // Of the worker; of the destructor once that has ended.
  std::unordered_map<ImageId, Image> images_;

  Mutex mutex_;
  CondVar queue_changed_;
  std::deque<Job> queue_ GUARDED_BY(mutex_);
  std::deque<Job> finished_ GUARDED_BY(mutex_);
  std::function<void()> wakeup_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;

  std::thread worker_;  // last: starts when all else is there
};

}  // namespace

std::unique_ptr<KvTier> NewHostTier(HostTierOptions options) {
  if (!options.download) {
    options.download = [](void* host, const void* device, size_t bytes) {
      std::memcpy(host, device, bytes);
      return absl::OkStatus();
    };
  }
  if (!options.upload) {
    options.upload = [](void* device, const void* host, size_t bytes) {
      std::memcpy(device, host, bytes);
      return absl::OkStatus();
    };
  }
  if (!options.alloc || !options.release) {
    options.alloc = [](size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); };
    options.release = [](void* memory, size_t) { std::free(memory); };
  }
  return std::make_unique<HostTier>(std::move(options));
}

}  // namespace carryover
