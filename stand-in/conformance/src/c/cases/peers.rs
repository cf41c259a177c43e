//! Peers: access between contexts and devices. Cases of two devices answer `one-device` on one.

use super::super::asker::Asker;
use super::{Case, case};

pub(super) const CASES: &[Case] = &[
    case("peer.itself", |a| {
        let primary = a.primary;
        a.part("can_access");
        a.tell("cuDeviceCanAccessPeer", 7i32, &[0, 0]);
        a.part("can_access_99");
        a.get("cuDeviceCanAccessPeer", 7i32, &[0, 99]);
        a.ask("can_access_null", "cuDeviceCanAccessPeer", &[0, 0, 0]);
        a.ask("enable", "cuCtxEnablePeerAccess", &[primary, 0]);
        a.ask("disable", "cuCtxDisablePeerAccess", &[primary]);
        for attribute in [0u64, 1, 2, 3, 4, 5, 99] {
            a.part(format_args!("attribute_{attribute}"));
            a.tell("cuDeviceGetP2PAttribute", 77i32, &[attribute, 0, 0]);
        }
        a.part("attribute_of_99");
        a.get("cuDeviceGetP2PAttribute", 77i32, &[1, 0, 99]);
    }),
    case("peer.null", |a| {
        a.say("cuCtxEnablePeerAccess", &[0, 0]);
        a.say("cuCtxDisablePeerAccess", &[0]);
    }),
    case("peer.context_of_the_same_device", |a| {
        let primary = a.primary;
        a.context();
        a.ask("enable", "cuCtxEnablePeerAccess", &[primary, 0]);
        a.ask("again", "cuCtxEnablePeerAccess", &[primary, 0]);
        a.ask("flags_1", "cuCtxEnablePeerAccess", &[primary, 1]);
        a.ask("disable", "cuCtxDisablePeerAccess", &[primary]);
        a.ask("again_disable", "cuCtxDisablePeerAccess", &[primary]);
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
    let primary = a.primary;
    let Some(other) = a.peer() else { return };
    a.need("cuCtxPushCurrent_v2", &[other]);
    let memory = a.alloc(4096);
    a.need("cuCtxPopCurrent_v2", &[0]);
    a.part("can_access");
    a.tell("cuDeviceCanAccessPeer", 7i32, &[0, 1]);
    for attribute in [0u64, 1, 2, 3, 4, 5] {
        a.part(format_args!("attribute_{attribute}"));
        a.tell("cuDeviceGetP2PAttribute", 77i32, &[attribute, 0, 1]);
    }
    let mine = a.alloc(4096);
    a.ask("before", "cuMemsetD8_v2", &[memory, 1, 16]);
    a.say("cuMemcpyDtoD_v2", &[mine, memory, 16]);
    a.say("cuMemcpyPeer", &[mine, primary, memory, other, 16]);
    a.ask("disable_unenabled", "cuCtxDisablePeerAccess", &[other]);
    a.ask("flags_1", "cuCtxEnablePeerAccess", &[other, 1]);
    a.ask("enable", "cuCtxEnablePeerAccess", &[other, 0]);
    a.ask("again", "cuCtxEnablePeerAccess", &[other, 0]);
    a.ask("after", "cuMemsetD8_v2", &[memory, 1, 16]);
    a.say("cuMemcpyDtoD_v2", &[mine, memory, 16]);
    a.ask("free", "cuMemFree_v2", &[memory]);
    a.ask("disable", "cuCtxDisablePeerAccess", &[other]);
    a.say("cuCtxDisablePeerAccess", &[other]);
}
