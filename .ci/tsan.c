/* Tells ThreadSanitizer about the synchronization inside the standard library.
 *
 * The standard library is compiled without the sanitizer. Only the parts of it that are inlined
 * into other crates are instrumented. Without this file a lock taken after a wait would order
 * nothing, and each access under it would be reported as a race. The linker redirects the calls
 * here (--wrap), and each wrapper adds exactly the order that the real function promises, so that
 * no race is hidden.
 *
 * The script `tsan` beside this file passes the mangled names. */

void __tsan_acquire(void *address);
void __tsan_release(void *address);

typedef unsigned long word;
/* A return value of up to two registers. */
struct answer {
    word low, high;
};

#define JOIN(a, b) a##b
#define REAL(name) JOIN(__real_, name)
#define WRAP(name) JOIN(__wrap_, name)

/* A lock taken after a wait. */
#define TAKES(name)                                                                              \
    struct answer REAL(name)(void *, word, word, word, word, word);                              \
    struct answer WRAP(name)(void *lock, word b, word c, word d, word e, word f)                 \
    {                                                                                            \
        struct answer answer = REAL(name)(lock, b, c, d, e, f);                                  \
        __tsan_acquire(lock);                                                                    \
        return answer;                                                                           \
    }

/* A wait that releases the lock and takes it again. */
#define WAITS(name)                                                                              \
    struct answer REAL(name)(void *, void *, word, word, word, word);                            \
    struct answer WRAP(name)(void *condition, void *lock, word c, word d, word e, word f)        \
    {                                                                                            \
        __tsan_release(lock);                                                                    \
        struct answer answer = REAL(name)(condition, lock, c, d, e, f);                          \
        __tsan_acquire(lock);                                                                    \
        return answer;                                                                           \
    }

TAKES(MUTEX_LOCK_CONTENDED)
TAKES(RWLOCK_READ_CONTENDED)
TAKES(RWLOCK_WRITE_CONTENDED)
WAITS(CONDVAR_WAIT)
WAITS(CONDVAR_WAIT_TIMEOUT)

/* The thread that drops the last Arc decrements the count with order "release" and then executes an
 * "acquire" fence, so that all other owners are done with the memory that it frees. The sanitizer
 * ignores fences, so the fence acquires the address of this thread's last count. */
static __thread volatile word *last_count;

word __real___tsan_atomic64_fetch_sub(volatile word *, word, int);
word __wrap___tsan_atomic64_fetch_sub(volatile word *count, word by, int order)
{
    last_count = count;
    return __real___tsan_atomic64_fetch_sub(count, by, order);
}

void __real___tsan_atomic_thread_fence(int);
void __wrap___tsan_atomic_thread_fence(int order)
{
    __real___tsan_atomic_thread_fence(order);
    if (last_count) {
        __tsan_acquire((void *)last_count);
    }
}

/* The first caller runs the initialization, and other threads see its writes. Other threads can
 * observe its completion before the real function returns to this wrapper, so the release has to
 * happen at the end of the initialization itself, a `&mut dyn FnMut(&OnceState)`. A copy of its
 * vtable has the function below in place of `call_mut`. The vtable begins with drop, size and
 * alignment; `call_once` and `call_mut` follow. */
enum { CALL_MUT = 4, VTABLE = 5 };

struct initialisation {
    void *once, *captured;
    void (*call_mut)(void *captured, void *state);
};

static void initialise(void *told, void *state)
{
    struct initialisation *real = told;
    real->call_mut(real->captured, state);
    __tsan_release(real->once);
}

struct answer REAL(ONCE_CALL)(void *, word, void *, void **, word, word);
struct answer WRAP(ONCE_CALL)(void *once, word b, void *captured, void **vtable, word e, word f)
{
    struct initialisation told = {once, captured, (void (*)(void *, void *))vtable[CALL_MUT]};
    void *changed[VTABLE];
    for (int i = 0; i < VTABLE; i++) {
        changed[i] = i == CALL_MUT ? (void *)initialise : vtable[i];
    }
    struct answer answer = REAL(ONCE_CALL)(once, b, &told, changed, e, f);
    __tsan_acquire(once);
    return answer;
}

/* The end of a scoped thread. The owner of the scope waits for it by reading a counter, one of the
 * three words of this structure. */
struct answer REAL(SCOPE_DECREMENT)(void *, word, word, word, word, word);
struct answer WRAP(SCOPE_DECREMENT)(void *scope, word b, word c, word d, word e, word f)
{
    for (int i = 0; i < 3; i++) {
        __tsan_release((word *)scope + i);
    }
    return REAL(SCOPE_DECREMENT)(scope, b, c, d, e, f);
}
