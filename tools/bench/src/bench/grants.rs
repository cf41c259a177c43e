//! Granting and revoking a second device's access.

use anyhow::ensure;
use cuvmm::driver::AccessFlags;
use cuvmm::{Access, Region};

use super::by_hand::access;
use super::commit::{GIB, MIB};
use super::peers::second;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use super::wanted::Wanted;

pub(super) const SIZES: [(&str, u64); 3] =
    [("2MiB", 2 * MIB), ("128MiB", 128 * MIB), ("2GiB", 2 * GIB)];

const GIVEN: &str = "set_access for that device by hand";
const OWN: &str = "set_access for the memory's own device by hand";
const TAKEN: &str = "set_access of nothing for that device by hand";
const WAITS: &str = "ours also waits for the device, which does nothing";

pub(super) fn names(size: &str) -> [String; 3] {
    [
        format!("grant_{size}"),
        format!("grant_{size}_vs_own_device"),
        format!("revoke_{size}"),
    ]
}

pub(super) fn measure(
    stage: &Stage,
    wanted: &Wanted,
    report: &mut Report,
    (word, size): (&str, u64),
) -> anyhow::Result<()> {
    let peer = second(stage)?;
    stage.room(2 * size)?;
    let mut samples: [Samples; 5] = Default::default();
    for turn in 0..=stage.times(20, 2) {
        // Page tables may remain after a grant, so each turn uses new memory and addresses.
        let mut region = Region::builder(&stage.device, size)
            .largest_extent(size)
            .reserve()?;
        region.commit(0..size)?;
        let granted = stage.time(|| region.grant(&peer, Access::ReadWrite))?;
        ensure!(
            region.access_of(&peer) == Access::ReadWrite,
            "it was not let in"
        );
        let revoked = stage.time(|| region.revoke_blocking(&peer))?;
        ensure!(
            region.access_of(&peer) == Access::None,
            "it was not shut out"
        );
        let extents = region.extents().len();
        ensure!(extents == 1, "{extents} extents");
        drop(region);

        let mut range = stage.hand.reserve(size, 1)?;
        range.hold(size)?;
        range.place()?;
        let own = stage.time(|| range.open())?;
        let to_peer = |flags| range.set_access(0, &[access(peer.ordinal(), flags)]);
        let given = stage.time(|| to_peer(AccessFlags::READ_WRITE))?;
        let taken = stage.time(|| to_peer(AccessFlags::NONE))?;
        if turn > 0 {
            let times = [granted, revoked, own, given, taken];
            for (samples, took) in samples.iter_mut().zip(times) {
                samples.add(took);
            }
        }
    }
    let [granted, revoked, own, given, taken] = &samples;
    let rows = [
        (granted, GIVEN, given),
        (granted, OWN, own),
        (revoked, TAKEN, taken),
    ];
    for (name, (ours, baseline, baselines)) in names(word).into_iter().zip(rows) {
        if wanted.has(&name) {
            let note = (baseline == TAKEN).then_some(WAITS);
            let row = Row::new(name, ours, baseline, baselines).note(note);
            report.add(row.note(stage.watch.note()));
        }
    }
    Ok(())
}
