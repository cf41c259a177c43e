//! Queries about the driver and its devices: version, properties, memory.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};

use cuvmm_sys::{CUdevice_attribute, CUmemAllocationGranularity_flags, CUuuid, CudaVersion};

use super::CudaDriver;
use super::answer::{ask, ask_optional};
use super::os::Security;
use super::physical::to_c;
use crate::{Call, DeviceAttribute, GranularityKind, MemoryInfo, Ordinal, PhysicalProps, Result};

pub(super) fn version(driver: &CudaDriver) -> Result<CudaVersion> {
    let mut version = 0;
    ask!(driver, DriverGetVersion: cuDriverGetVersion(&mut version))?;
    Ok(CudaVersion::from_raw(version))
}

pub(super) fn device_count(driver: &CudaDriver) -> Result<i32> {
    driver.count()
}

pub(super) fn device_name(driver: &CudaDriver, device: Ordinal) -> Result<String> {
    let id = driver.device(Call::DeviceGetName, device)?;
    let mut name = [0u8; 256];
    let (start, length) = (name.as_mut_ptr().cast::<c_char>(), name.len() as c_int);
    ask!(driver, DeviceGetName: cuDeviceGetName(start, length, id))?;
    Ok(CStr::from_bytes_until_nul(&name)
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default())
}

pub(super) fn device_uuid(driver: &CudaDriver, device: Ordinal) -> Result<[u8; 16]> {
    let id = driver.device(Call::DeviceGetUuid, device)?;
    let mut uuid = CUuuid::default();
    // The second version distinguishes the parts of a partitioned GPU. The first is older than
    // partitioning.
    if driver.api().cuDeviceGetUuid_v2.is_present() {
        ask_optional!(driver, DeviceGetUuid: cuDeviceGetUuid_v2(&mut uuid, id))?;
    } else {
        ask_optional!(driver, DeviceGetUuid: cuDeviceGetUuid(&mut uuid, id))?;
    }
    Ok(uuid.bytes.map(|byte| byte as u8))
}

pub(super) fn device_attribute(
    driver: &CudaDriver,
    device: Ordinal,
    attribute: DeviceAttribute,
) -> Result<i32> {
    let id = driver.device(Call::DeviceGetAttribute, device)?;
    let attribute = CUdevice_attribute(attribute.0);
    let mut value = 0;
    ask!(driver, DeviceGetAttribute: cuDeviceGetAttribute(&mut value, attribute, id))?;
    Ok(value)
}

pub(super) fn total_memory(driver: &CudaDriver, device: Ordinal) -> Result<u64> {
    let id = driver.device(Call::DeviceTotalMem, device)?;
    let mut bytes = 0;
    ask!(driver, DeviceTotalMem: cuDeviceTotalMem_v2(&mut bytes, id))?;
    Ok(bytes as u64)
}

pub(super) fn memory_info(driver: &CudaDriver, device: Ordinal) -> Result<MemoryInfo> {
    let _current = driver.enter(device)?;
    let (mut free, mut total) = (0, 0);
    ask!(driver, MemGetInfo: cuMemGetInfo_v2(&mut free, &mut total))?;
    Ok(MemoryInfo {
        free: free as u64,
        total: total as u64,
    })
}

pub(super) fn can_access_peer(driver: &CudaDriver, device: Ordinal, peer: Ordinal) -> Result<bool> {
    let id = driver.device(Call::DeviceCanAccessPeer, device)?;
    let peer = driver.device(Call::DeviceCanAccessPeer, peer)?;
    let mut can = 0;
    ask!(driver, DeviceCanAccessPeer: cuDeviceCanAccessPeer(&mut can, id, peer))?;
    Ok(can != 0)
}

pub(super) fn allocation_granularity(
    driver: &CudaDriver,
    props: &PhysicalProps,
    kind: GranularityKind,
) -> Result<u64> {
    let security = Security::of(Call::MemGetAllocationGranularity, props.handle_types)?;
    let props = to_c(props, &security);
    let kind = CUmemAllocationGranularity_flags(kind.0);
    let mut granularity = 0;
    ask!(driver, MemGetAllocationGranularity:
        cuMemGetAllocationGranularity(&mut granularity, &props, kind))?;
    Ok(granularity as u64)
}
