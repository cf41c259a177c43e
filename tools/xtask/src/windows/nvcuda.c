/* A stand-in for nvcuda.dll that answers what loading and handles need. Memory is an event of the
 * system, so that a handle of it can be exported, imported and looked at. All other functions of the table
 * return 0 and do nothing; `windows.rs` adds them. */
#define _WIN32_WINNT 0x0a00
#include <windows.h>
#include <winternl.h>
#include <string.h>

#define API __declspec(dllexport) int
enum { SUCCESS = 0, INVALID_VALUE = 1, UNKNOWN = 999, WIN32_HANDLE = 2, KMT_HANDLE = 4 };

struct location { int type, id; };
struct memory { int type, handle_types; struct location at; OBJECT_ATTRIBUTES *attributes; };
struct pool { int type, handle_types; struct location at; SECURITY_ATTRIBUTES *attributes; };

/* Whether a descriptor inherits nothing, has two entries, and none for everyone. */
static int is_private(PSECURITY_DESCRIPTOR descriptor) {
    SECURITY_DESCRIPTOR_CONTROL control;
    DWORD revision, size = SECURITY_MAX_SID_SIZE, index;
    BOOL present, defaulted;
    ACL *list;
    char everyone[SECURITY_MAX_SID_SIZE];
    if (!IsValidSecurityDescriptor(descriptor) ||
        !GetSecurityDescriptorControl(descriptor, &control, &revision) || !(control & SE_DACL_PROTECTED) ||
        !GetSecurityDescriptorDacl(descriptor, &present, &list, &defaulted) || !present || !list ||
        list->AceCount != 2 || !CreateWellKnownSid(WinWorldSid, NULL, everyone, &size))
        return 0;
    for (index = 0; index < list->AceCount; index++) {
        ACCESS_ALLOWED_ACE *entry;
        if (!GetAce(list, index, (void **)&entry) || EqualSid(&entry->SidStart, everyone)) return 0;
    }
    return 1;
}

static int has_right_attributes(const struct memory *wanted) {
    OBJECT_ATTRIBUTES *it = wanted->attributes;
    if (!(wanted->handle_types & WIN32_HANDLE)) return it == NULL;
    return it && it->Length == sizeof *it && it->Attributes == 0 && !it->ObjectName && !it->RootDirectory &&
           is_private(it->SecurityDescriptor);
}

API cuDriverGetVersion(int *version) { *version = 12040; return SUCCESS; }
API cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
API cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = (void *)1; return SUCCESS; }

API cuMemGetAllocationGranularity(size_t *size, const struct memory *wanted, int kind) {
    (void)kind;
    *size = 2 << 20;
    return has_right_attributes(wanted) ? SUCCESS : INVALID_VALUE;
}

API cuMemCreate(unsigned long long *handle, size_t size, const struct memory *wanted, unsigned long long flags) {
    (void)size, (void)flags;
    if (!has_right_attributes(wanted)) return INVALID_VALUE;
    *handle = (unsigned long long)CreateEventW(NULL, TRUE, FALSE, NULL);
    return SUCCESS;
}

API cuMemRelease(unsigned long long handle) { return CloseHandle((HANDLE)handle) ? SUCCESS : INVALID_VALUE; }

static int duplicate(HANDLE from, HANDLE *to) {
    HANDLE here = GetCurrentProcess();
    return DuplicateHandle(here, from, here, to, 0, FALSE, DUPLICATE_SAME_ACCESS);
}

API cuMemExportToShareableHandle(void *place, unsigned long long handle, int type, unsigned long long flags) {
    (void)flags;
    if (type == KMT_HANDLE) { *(unsigned *)place = 0x40000000; return SUCCESS; }
    return type == WIN32_HANDLE && duplicate((HANDLE)handle, place) ? SUCCESS : INVALID_VALUE;
}

/* Sets the event, so that who has another handle of it sees that it was this one. */
API cuMemImportFromShareableHandle(unsigned long long *handle, void *shared, int type) {
    if (type != WIN32_HANDLE) return INVALID_VALUE;
    return SetEvent(shared) && duplicate(shared, (HANDLE *)handle) ? SUCCESS : UNKNOWN;
}

API cuMemGetHandleForAddressRange(int *handle, unsigned long long at, size_t size, int type,
                                  unsigned long long flags) {
    (void)at, (void)size, (void)type, (void)flags;
    *handle = 5;
    return SUCCESS;
}

API cuMemPoolCreate(void **made, const struct pool *wanted) {
    SECURITY_ATTRIBUTES *it = wanted->attributes;
    int exported = wanted->handle_types & WIN32_HANDLE;
    *made = (void *)1;
    if (!exported) return it == NULL ? SUCCESS : INVALID_VALUE;
    return it && it->nLength == sizeof *it && !it->bInheritHandle && is_private(it->lpSecurityDescriptor)
               ? SUCCESS : INVALID_VALUE;
}
