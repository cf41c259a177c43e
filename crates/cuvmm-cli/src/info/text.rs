//! Report of `info` as text.

use std::fmt::Write as _;

use cuvmm_command::page::Page;
use cuvmm_command::size::iec as size;

use super::topology::{Place, Reaches};
use super::{Device, Granularity, Info};

pub(super) fn of(info: &Info, page: Page) -> String {
    let mut drivers = page.list();
    for found in &info.drivers {
        let there = if found.there { "there" } else { "not there" };
        drivers.add_row([found.driver, there, &*found.reason]);
    }
    let mut text = format!("Drivers\n{}\n", drivers.trim_fmt());
    let _ = write!(
        text,
        "\nDevices of the {} driver, CUDA {} ({})\n",
        info.driver, info.cuda_version, info.reason
    );
    for device in &info.devices {
        describe(&mut text, device, page);
    }
    lay_out(&mut text, &info.topology, page);
    page.fold(&text)
}

/// Appends a table of the memory that each device can access, with the reasons of failures below.
fn lay_out(text: &mut String, topology: &[Reaches], page: Page) {
    let Some(first) = topology.first() else {
        return;
    };
    let _ = writeln!(text, "\nWhose memory each device reaches");
    let mut rows = page.list();
    let places = first.places.iter().map(|place| place.place.clone());
    rows.add_row(std::iter::once(String::new()).chain(places));
    for reaches in topology {
        let word = |place: &Place| match (place.reached, place.near) {
            (true, true) => "yes, near",
            (true, false) => "yes",
            (false, _) => "no",
        };
        let name = format!("device {}", reaches.device);
        let words = reaches.places.iter().map(|place| word(place).to_owned());
        rows.add_row(std::iter::once(name).chain(words));
    }
    let _ = writeln!(text, "{}", rows.trim_fmt());
    for reaches in topology {
        for place in &reaches.places {
            if let Some(reason) = &place.reason {
                let (device, place) = (reaches.device, &place.place);
                let _ = writeln!(text, "device {device} does not reach {place}: {reason}");
            }
        }
    }
}

/// Appends the table of one device. Writing to a string does not fail.
fn describe(text: &mut String, device: &Device, page: Page) {
    let _ = writeln!(text, "\n{} {}", device.ordinal, device.name);
    let mut rows = page.list();
    if let Some(uuid) = &device.uuid {
        rows.add_row(["identity", uuid]);
    }
    let sizes = (device.free.map(size), device.total.map(size));
    rows.add_row([
        "memory",
        &match sizes {
            (Some(free), Some(total)) => format!("{free} free of {total}"),
            (None, Some(total)) => total,
            _ => "unknown".to_owned(),
        },
    ]);
    for granularity in &device.granularities {
        rows.add_row(["granularity", &multiples(granularity)]);
    }
    let _ = writeln!(text, "{}", rows.trim_fmt());
    let mut rows = page.list();
    for capability in &device.capabilities {
        let there = if capability.there { "yes" } else { "no" };
        rows.add_row([
            &*capability.name,
            there,
            capability.reason.as_deref().unwrap_or(""),
        ]);
    }
    let _ = writeln!(text, "{}", rows.trim_fmt());
}

fn multiples(granularity: &Granularity) -> String {
    let memory = &granularity.memory;
    match (
        granularity.minimum,
        granularity.recommended,
        &granularity.refused,
    ) {
        (Some(minimum), Some(recommended), _) => {
            format!("{memory}: {}, best {}", size(minimum), size(recommended))
        }
        (Some(minimum), None, _) => format!("{memory}: {}", size(minimum)),
        (None, _, reason) => format!("{memory}: none, {}", reason.as_deref().unwrap_or("unknown")),
    }
}
