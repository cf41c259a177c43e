// A stand-in for the parts of PyTorch's libc10.so and libc10_cuda.so that throw for a lack of memory.
// With WITHOUT_CLASSES it has only the function that throws c10::Error.

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace c10 {

struct SourceLocation {
    const char *function;
    const char *file;
    uint32_t line;
};

class Error : public std::exception {
    std::string msg_;
    std::vector<std::string> context_;
    std::string what_;
    const void *caller_;

  public:
    Error(SourceLocation source, std::string msg);
    const char *what() const noexcept override { return what_.c_str(); }
    virtual const char *what_without_backtrace() const noexcept { return msg_.c_str(); }
};

#ifdef WITHOUT_CLASSES
// Another name, so that the constructor is not found.
#define CONSTRUCTOR __attribute__((visibility("hidden")))
#else
#define CONSTRUCTOR
#endif

CONSTRUCTOR Error::Error(SourceLocation source, std::string msg)
    : msg_(std::move(msg)), caller_(this) {
    what_ = msg_ + "\nraised from " + source.function + " at " + source.file + ":" +
            std::to_string(source.line);
}

class OutOfMemoryError : public Error {
    using Error::Error;
};

namespace detail {

[[noreturn]] void torchCheckFail(const char *function, const char *file, uint32_t line,
                                 const char *msg) {
    throw Error({function, file, line}, msg);
}

}  // namespace detail

// PyTorch's type for devices: two bytes, with a constructor, passed by value.
enum class DeviceType : int8_t { CPU = 0, CUDA = 1 };

struct Device final {
    Device(DeviceType type, int8_t index) : type_(type), index_(index) {}
    DeviceType type_;
    int8_t index_;
};

// Whether a profiler is active on this thread, and what was reported to it.
thread_local bool profiles = false;
int64_t reported[6] = {0};

bool memoryProfilingEnabled() { return profiles; }

void reportMemoryUsageToProfiler(void *ptr, int64_t alloc_size, size_t total_allocated,
                                 size_t total_reserved, Device device) {
    int64_t report[] = {(int64_t)ptr,
                        alloc_size,
                        (int64_t)total_allocated,
                        (int64_t)total_reserved,
                        (int64_t)device.type_ * 1000 + device.index_,
                        reported[5] + 1};
    for (int at = 0; at < 6; at++) reported[at] = report[at];
}
}  // namespace c10

extern "C" {
void c10_profiles(int on) { c10::profiles = on != 0; }

// The last report: address, bytes, allocated, reserved, device, and the number of reports.
const int64_t *c10_reported() { return c10::reported; }


typedef void *(*Malloc)(long, int, void *);

// Allocates. Returns 0 for an address, 1 for OutOfMemoryError, 2 for Error, 3 for another exception,
// and writes the address or the text of the exception.
int c10_attempt(Malloc allocate, long size, void *stream, void **address, char *text, size_t length) {
    auto written = [&](const char *what) { std::string(what).append(1, '\0').copy(text, length); };
    try {
        *address = allocate(size, 0, stream);
        return 0;
    } catch (const c10::OutOfMemoryError &error) {
        written(error.what());
        return 1;
    } catch (const c10::Error &error) {
        written(error.what());
        return 2;
    } catch (...) {
        return 3;
    }
}

// Allocates in threads, one allocation each. Returns how many got an address.
int c10_attempts(Malloc allocate, long size, int threads) {
    std::atomic<int> made{0};
    std::vector<std::thread> all;
    for (int at = 0; at < threads; at++) {
        all.emplace_back([&] {
            void *address = nullptr;
            char text[64];
            made += c10_attempt(allocate, size, nullptr, &address, text, sizeof text) == 0;
        });
    }
    for (auto &thread : all) thread.join();
    return made;
}

using Id = std::pair<unsigned long long, unsigned long long>;
typedef void (*Begin)(int, Id, std::function<bool(void *)>);

// Opens a pool of device 0 for one stream. Returns 0, 2 for Error, or 3 for another exception, and
// writes the text of the exception.
int c10_begin(Begin begin, unsigned long long first, unsigned long long second, void *stream,
              char *text, size_t length) {
    try {
        begin(0, {first, second}, [stream](void *other) { return other == stream; });
        return 0;
    } catch (const c10::Error &error) {
        std::string(error.what()).append(1, '\0').copy(text, length);
        return 2;
    } catch (...) {
        return 3;
    }
}

// Not called. It makes the compiler emit the class.
void c10_throws() { throw c10::OutOfMemoryError({"", "", 0}, ""); }
}
