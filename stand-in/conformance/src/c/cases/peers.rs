//! Peers: access between contexts and devices. Cases of two devices answer `one-device` on one.

use super::super::asker::Asker;
use super::super::library::at;
use super::{Case, case};

pub(super) const CASES: &[Case] = &[
    case("peer.itself", |a| {
        let primary = a.enter();
        let mut can = 7i32;
        a.part("can_access");
        a.say("cuDeviceCanAccessPeer", &[at(&mut can), 0, 0]);
        a.note(can);
        a.part("can_access_99");
        a.say("cuDeviceCanAccessPeer", &[at(&mut can), 0, 99]);
        a.part("can_access_null");
        a.say("cuDeviceCanAccessPeer", &[0, 0, 0]);
        a.part("enable");
        a.say("cuCtxEnablePeerAccess", &[primary, 0]);
        a.part("disable");
        a.say("cuCtxDisablePeerAccess", &[primary]);
        for attribute in [0u64, 1, 2, 3, 4, 5, 99] {
            let mut value = 77i32;
            a.part(format_args!("attribute_{attribute}"));
            let arguments = [at(&mut value), attribute, 0, 0];
            a.say("cuDeviceGetP2PAttribute", &arguments);
            a.note(value);
        }
        a.part("attribute_of_99");
        let mut value = 77i32;
        a.say("cuDeviceGetP2PAttribute", &[at(&mut value), 1, 0, 99]);
    }),
    case("peer.null", |a| {
        a.enter();
        a.say("cuCtxEnablePeerAccess", &[0, 0]);
        a.say("cuCtxDisablePeerAccess", &[0]);
    }),
    case("peer.context_of_the_same_device", |a| {
        let primary = a.enter();
        let mut made = 0u64;
        a.need("cuCtxCreate_v2", &[at(&mut made), 0, 0]);
        a.part("enable");
        a.say("cuCtxEnablePeerAccess", &[primary, 0]);
        a.part("again");
        a.say("cuCtxEnablePeerAccess", &[primary, 0]);
        a.part("flags_1");
        a.say("cuCtxEnablePeerAccess", &[primary, 1]);
        a.part("disable");
        a.say("cuCtxDisablePeerAccess", &[primary]);
        a.part("again_disable");
        a.say("cuCtxDisablePeerAccess", &[primary]);
        a.part("memory_of_the_other");
        let memory = a.alloc(4096);
        a.need("cuCtxSetCurrent", &[primary]);
        a.say("cuMemsetD8_v2", &[memory, 1, 16]);
        a.say("cuMemFree_v2", &[memory]);
    }),
    case("peer.two_devices", two_devices),
];

/// Enables access of the first device to the second's memory, and uses it.
fn two_devices(a: &mut Asker) {
    let primary = a.enter();
    if a.devices() < 2 {
        return a.note("one-device");
    }
    let mut other = 0u64;
    a.need("cuDevicePrimaryCtxRetain", &[at(&mut other), 1]);
    a.need("cuCtxPushCurrent_v2", &[other]);
    let memory = a.alloc(4096);
    a.need("cuCtxPopCurrent_v2", &[0]);
    a.part("can_access");
    let mut can = 7i32;
    a.say("cuDeviceCanAccessPeer", &[at(&mut can), 0, 1]);
    a.note(can);
    for attribute in [0u64, 1, 2, 3, 4, 5] {
        let mut value = 77i32;
        a.part(format_args!("attribute_{attribute}"));
        let arguments = [at(&mut value), attribute, 0, 1];
        a.say("cuDeviceGetP2PAttribute", &arguments);
        a.note(value);
    }
    let mine = a.alloc(4096);
    a.part("before");
    a.say("cuMemsetD8_v2", &[memory, 1, 16]);
    a.say("cuMemcpyDtoD_v2", &[mine, memory, 16]);
    a.say("cuMemcpyPeer", &[mine, primary, memory, other, 16]);
    a.part("disable_unenabled");
    a.say("cuCtxDisablePeerAccess", &[other]);
    a.part("flags_1");
    a.say("cuCtxEnablePeerAccess", &[other, 1]);
    a.part("enable");
    a.say("cuCtxEnablePeerAccess", &[other, 0]);
    a.part("again");
    a.say("cuCtxEnablePeerAccess", &[other, 0]);
    a.part("after");
    a.say("cuMemsetD8_v2", &[memory, 1, 16]);
    a.say("cuMemcpyDtoD_v2", &[mine, memory, 16]);
    a.part("free");
    a.say("cuMemFree_v2", &[memory]);
    a.part("disable");
    a.say("cuCtxDisablePeerAccess", &[other]);
    a.say("cuCtxDisablePeerAccess", &[other]);
}
