//! The driver's result codes.
//!
//! They are an integer with names and not a Rust `enum`: the list grows with every release, and a
//! driver newer than this crate returns codes that are not in it.

use crate::newtype::c_enum;

c_enum! {
    /// The result code of a driver function: 0 for success, any other value for an error.
    ///
    /// It compares with the constants, and prints as its C name (or as a number if this crate does
    /// not know the code).
    #[must_use = "a driver call may have failed"]
    pub struct CUresult {
        /// The call succeeded.
        CUDA_SUCCESS = 0,
        /// An argument is out of range, or does not name an existing object.
        CUDA_ERROR_INVALID_VALUE = 1,
        /// There is not enough memory of the required kind. Page tables and addresses count as
        /// memory.
        CUDA_ERROR_OUT_OF_MEMORY = 2,
        /// `cuInit` has not been called.
        CUDA_ERROR_NOT_INITIALIZED = 3,
        /// The process is ending and the driver has shut down already.
        CUDA_ERROR_DEINITIALIZED = 4,
        CUDA_ERROR_PROFILER_DISABLED = 5,
        CUDA_ERROR_PROFILER_NOT_INITIALIZED = 6,
        CUDA_ERROR_PROFILER_ALREADY_STARTED = 7,
        CUDA_ERROR_PROFILER_ALREADY_STOPPED = 8,
        /// The library is the toolkit's stub for linking and not a driver.
        CUDA_ERROR_STUB_LIBRARY = 34,
        CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER = 36,
        CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
        CUDA_ERROR_MULTICAST_RESOURCE_FULL = 47,
        /// The driver sees no device.
        CUDA_ERROR_NO_DEVICE = 100,
        /// No device has this number.
        CUDA_ERROR_INVALID_DEVICE = 101,
        CUDA_ERROR_DEVICE_NOT_LICENSED = 102,
        CUDA_ERROR_INVALID_IMAGE = 200,
        /// No context is current, or the one given is not valid.
        CUDA_ERROR_INVALID_CONTEXT = 201,
        CUDA_ERROR_CONTEXT_ALREADY_CURRENT = 202,
        /// A mapping failed.
        CUDA_ERROR_MAP_FAILED = 205,
        /// An unmapping failed.
        CUDA_ERROR_UNMAP_FAILED = 206,
        CUDA_ERROR_ARRAY_IS_MAPPED = 207,
        CUDA_ERROR_ALREADY_MAPPED = 208,
        CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
        CUDA_ERROR_ALREADY_ACQUIRED = 210,
        CUDA_ERROR_NOT_MAPPED = 211,
        CUDA_ERROR_NOT_MAPPED_AS_ARRAY = 212,
        CUDA_ERROR_NOT_MAPPED_AS_POINTER = 213,
        /// Memory returned a wrong value that could not be corrected. The context is lost.
        CUDA_ERROR_ECC_UNCORRECTABLE = 214,
        CUDA_ERROR_UNSUPPORTED_LIMIT = 215,
        CUDA_ERROR_CONTEXT_ALREADY_IN_USE = 216,
        /// The two devices cannot access each other's memory.
        CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
        CUDA_ERROR_INVALID_PTX = 218,
        CUDA_ERROR_INVALID_GRAPHICS_CONTEXT = 219,
        CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
        CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
        CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,
        CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY = 224,
        CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC = 225,
        /// The device contained an error: of hardware, or of a peer's memory. The context is lost.
        CUDA_ERROR_CONTAINED = 226,
        CUDA_ERROR_INSUFFICIENT_LOADER_VERSION = 227,
        CUDA_ERROR_INVALID_SOURCE = 300,
        CUDA_ERROR_FILE_NOT_FOUND = 301,
        CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302,
        CUDA_ERROR_SHARED_OBJECT_INIT_FAILED = 303,
        /// A call to the operating system failed.
        CUDA_ERROR_OPERATING_SYSTEM = 304,
        /// The handle is not valid.
        CUDA_ERROR_INVALID_HANDLE = 400,
        /// The object is not in a state that allows this.
        CUDA_ERROR_ILLEGAL_STATE = 401,
        CUDA_ERROR_LOSSY_QUERY = 402,
        /// The named object was not found.
        CUDA_ERROR_NOT_FOUND = 500,
        /// Work is not done yet. This is a status and not a failure.
        CUDA_ERROR_NOT_READY = 600,
        /// A kernel accessed an address with nothing mapped. The context is lost.
        CUDA_ERROR_ILLEGAL_ADDRESS = 700,
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
        CUDA_ERROR_LAUNCH_TIMEOUT = 702,
        CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING = 703,
        CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
        CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
        CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
        /// The context has been destroyed.
        CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
        CUDA_ERROR_ASSERT = 710,
        CUDA_ERROR_TOO_MANY_PEERS = 711,
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
        CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
        CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
        CUDA_ERROR_ILLEGAL_INSTRUCTION = 715,
        CUDA_ERROR_MISALIGNED_ADDRESS = 716,
        CUDA_ERROR_INVALID_ADDRESS_SPACE = 717,
        CUDA_ERROR_INVALID_PC = 718,
        /// A kernel failed. The context is lost.
        CUDA_ERROR_LAUNCH_FAILED = 719,
        CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720,
        /// A kernel ended without freeing its tensor memory. The context is lost.
        CUDA_ERROR_TENSOR_MEMORY_LEAK = 721,
        /// The call is not allowed here, by configuration or by permissions.
        CUDA_ERROR_NOT_PERMITTED = 800,
        /// The device or the driver does not support the call.
        CUDA_ERROR_NOT_SUPPORTED = 801,
        CUDA_ERROR_SYSTEM_NOT_READY = 802,
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
        CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
        CUDA_ERROR_MPS_CONNECTION_FAILED = 805,
        CUDA_ERROR_MPS_RPC_FAILURE = 806,
        CUDA_ERROR_MPS_SERVER_NOT_READY = 807,
        CUDA_ERROR_MPS_MAX_CLIENTS_REACHED = 808,
        CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED = 809,
        /// The MPS server has ended this client. The context is lost.
        CUDA_ERROR_MPS_CLIENT_TERMINATED = 810,
        CUDA_ERROR_CDP_NOT_SUPPORTED = 811,
        CUDA_ERROR_CDP_VERSION_MISMATCH = 812,
        /// The call is not possible while a stream is being captured.
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
        /// An earlier call invalidated the capture.
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
        CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
        /// The capture did not begin on this stream.
        CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
        CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
        CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
        CUDA_ERROR_CAPTURED_EVENT = 907,
        /// The capture began on another thread.
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
        CUDA_ERROR_TIMEOUT = 909,
        CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
        /// A device outside CUDA signaled that the memory it shares is not valid. The context is
        /// lost.
        CUDA_ERROR_EXTERNAL_DEVICE = 911,
        CUDA_ERROR_INVALID_CLUSTER_SIZE = 912,
        CUDA_ERROR_FUNCTION_NOT_LOADED = 913,
        CUDA_ERROR_INVALID_RESOURCE_TYPE = 914,
        CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915,
        CUDA_ERROR_KEY_ROTATION = 916,
        CUDA_ERROR_STREAM_DETACHED = 917,
        CUDA_ERROR_GRAPH_RECAPTURE_FAILURE = 918,
        CUDA_ERROR_FABRIC_NOT_READY = 919,
        /// The call failed for a reason that the driver does not report.
        CUDA_ERROR_UNKNOWN = 999,
    }
}

impl CUresult {
    /// Returns `true` if the call succeeded.
    #[must_use]
    pub fn is_success(self) -> bool {
        self == Self::CUDA_SUCCESS
    }
}

#[cfg(test)]
mod tests {
    use super::CUresult;

    #[test]
    fn a_code_from_the_future_is_kept_and_printed() {
        let code = CUresult(123_456);
        assert_eq!(code.name(), None);
        assert_eq!(code.to_string(), "123456");
        assert_eq!(format!("{code:?}"), "CUresult(123456)");
        assert!(!code.is_success());
    }

    #[test]
    fn a_known_code_prints_its_name() {
        let code = CUresult(2);
        assert_eq!(code, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(code.to_string(), "CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(format!("{code:?}"), "CUDA_ERROR_OUT_OF_MEMORY(2)");
    }

    #[test]
    fn no_number_has_two_names() {
        let mut numbers: Vec<_> = CUresult::KNOWN.iter().map(|(_, code)| code.0).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), CUresult::KNOWN.len());
    }
}
