// Calls the functions of memory pools as PyTorch does.

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>

using Id = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(void *)>;
using Begin = void (*)(int, Id, Filter);
using End = void (*)(int, Id);

static long asked = 0;
static std::weak_ptr<int> alive;

extern "C" {

// Opens a pool for one stream. The function has a state that is not copied by its bytes.
void filter_begin(Begin begin, unsigned long long first, unsigned long long second, void *stream) {
    auto state = std::make_shared<int>(7);
    alive = state;
    Filter accepts = [state, stream](void *other) {
        ++asked;
        return *state == 7 && other == stream;
    };
    begin(0, {first, second}, std::move(accepts));
}

// Opens a pool for all streams with a function that is empty.
void filter_begin_empty(Begin begin, unsigned long long first, unsigned long long second) {
    begin(0, {first, second}, Filter());
}

// Opens a pool with a function that throws.
void filter_begin_throwing(Begin begin, unsigned long long first, unsigned long long second) {
    begin(0, {first, second}, [](void *) -> bool { throw std::runtime_error("on purpose"); });
}

void filter_end(End end, unsigned long long first, unsigned long long second) {
    end(0, {first, second});
}

long filter_asked() { return asked; }

int filter_alive() { return !alive.expired(); }

// Allocates. Returns null if an exception passes.
void *filter_malloc(void *(*allocate)(long, int, void *), long size, void *stream) {
    try {
        return allocate(size, 0, stream);
    } catch (const std::runtime_error &) {
        return nullptr;
    }
}
}
