//! Memory shared by two real processes: visible to both, held once, and kept by the last one.

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::gpu::{Stage, own_process};
use cuvmm::driver::{DriverKind, HandleTypes};
use cuvmm::error::{MemoryError, ShareError};
use cuvmm::share::{Listener, Manifest, Publisher, Subscriber, Tensor};
use cuvmm::{Access, Attachment, Channel, Device, Offer, Physical, Region};

const FD: HandleTypes = HandleTypes::POSIX_FD;

/// Environment variable with the socket that a child connects to.
const SOCKET: &str = "CUVMM_TEST_SOCKET";

/// Memory that the driver may allocate for itself when memory is mapped.
const SLACK: u64 = 64 << 20;

/// How long one process waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);

fn region(device: &Device, granules: u64) -> Region {
    let size = granules * device.granularity();
    let mut region = Region::builder(device, size)
        .shareable(FD)
        .reserve()
        .unwrap();
    region.commit(0..size).unwrap();
    region
}

/// Returns bytes derived from their offset.
fn stamp(at: u64) -> [u8; 16] {
    let mut stamp = *b"at 0123456789abc";
    stamp[3..11].copy_from_slice(&at.to_le_bytes());
    stamp
}

fn places(size: u64, g: u64) -> impl Iterator<Item = u64> {
    (0..size / g).flat_map(move |granule| [granule * g, (granule + 1) * g - 16])
}

fn child_of(test: &str, socket: &Path) -> Child {
    own_process::only(test)
        .env(SOCKET, socket)
        // The child's test summary would be mistaken for this process's.
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn ends_well(mut child: Child) {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "the other process failed: {status}");
            return;
        }
        if begun.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("the other process did not end");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for a byte that the other process writes to the shared memory.
fn wait_for(read: impl Fn(&mut [u8]), wanted: u8) {
    let begun = Instant::now();
    loop {
        let mut said = [0];
        read(&mut said);
        if said[0] == wanted {
            return;
        }
        assert!(
            begun.elapsed() < PATIENCE,
            "the other process wrote {}",
            said[0]
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn gives(stage: &Stage, child: &str) {
    let (device, g) = (&stage.device, stage.g());
    let stream = stage.stream();
    let granules = if device.driver().kind() == DriverKind::Cuda {
        512
    } else {
        16
    };
    let data = region(device, granules);
    let mailbox = region(device, 1);
    for at in places(data.size(), g) {
        data.write(&stream, at, &stamp(at)).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let listener = Listener::bind(folder.path().join("give")).unwrap();
    let child = child_of(child, listener.path());
    let mut channel = listener.accept(PATIENCE).unwrap();
    channel.set_timeout(PATIENCE);
    channel
        .send(&Offer::region(&data, 0..data.size()).unwrap())
        .unwrap();
    channel
        .send(&Offer::region(&mailbox, 0..g).unwrap().read_write())
        .unwrap();
    let read = |into: &mut [u8]| mailbox.read(&stream, 0, into).unwrap();
    wait_for(read, 1);
    data.close().unwrap();
    mailbox.write(&stream, 0, &[2]).unwrap();
    wait_for(read, 3);
    ends_well(child);
}

fn takes(stage: &Stage, socket: &Path) {
    let (device, g) = (&stage.device, stage.g());
    let stream = stage.stream();
    let mut channel = Channel::connect(socket).unwrap();
    channel.set_timeout(PATIENCE);
    // The first copy of a process makes the driver allocate memory.
    let own = region(device, 1);
    own.write(&stream, 0, b"x").unwrap();
    let before = device.memory_info().unwrap().free;
    let data = channel.recv(&Attachment::builder(device)).unwrap();
    let mailbox = channel
        .recv(&Attachment::builder(device).read_write())
        .unwrap();
    assert_eq!(
        (data.access(), mailbox.access()),
        (Access::Read, Access::ReadWrite)
    );
    let after = device.memory_info().unwrap().free;
    let taken = before.saturating_sub(after);
    assert!(data.held() > SLACK || device.driver().kind() != DriverKind::Cuda);
    assert!(
        taken < SLACK.min(data.held()),
        "{taken} bytes of device memory for {} attached bytes",
        data.held()
    );
    let verify = || {
        for at in places(data.size(), g) {
            let mut bytes = [0; 16];
            data.read(&stream, at, &mut bytes).unwrap();
            assert_eq!(bytes, stamp(at), "at {at}");
        }
    };
    verify();
    mailbox.write(&stream, 0, &[1]).unwrap();
    wait_for(|into| mailbox.read(&stream, 0, into).unwrap(), 2);
    // The giver has closed its memory, and all of it is still there.
    verify();
    data.close().unwrap();
    mailbox.write(&stream, 0, &[3]).unwrap();
}

fn publishes(stage: &Stage, child: &str) {
    let (device, g) = (&stage.device, stage.g());
    let stream = stage.stream();
    let folder = tempfile::tempdir().unwrap();
    let publisher = Publisher::bind(folder.path().join("models")).unwrap();
    let published = |text: &[u8; 5]| {
        let region = region(device, 3);
        region.write(&stream, g, text).unwrap();
        let tensor = Tensor {
            name: "weight".to_owned(),
            dtype: "U8".to_owned(),
            shape: vec![5],
            offset: g,
            size: 5,
        };
        let manifest = Manifest {
            tensors: vec![tensor],
            ..Manifest::default()
        };
        publisher.publish("model", manifest, region).unwrap()
    };
    assert_eq!(published(b"first"), 1);
    let child = child_of(child, publisher.path());
    let begun = Instant::now();
    // The reader signals that it has the first version by creating a socket of its own.
    let seen = folder.path().join("seen");
    while !seen.exists() {
        assert!(
            begun.elapsed() < PATIENCE,
            "timed out: the reader did not attach"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(published(b"other"), 2);
    ends_well(child);
}

fn subscribes(stage: &Stage, socket: &Path) {
    let device = &stage.device;
    let stream = stage.stream();
    let mut subscriber = Subscriber::connect(socket).unwrap();
    subscriber.channel().set_timeout(PATIENCE);
    let how = Attachment::builder(device);
    let bytes = |publication: &cuvmm::share::Publication| {
        let tensor = publication.manifest().tensor("weight").unwrap();
        let mut bytes = [0; 5];
        let memory = publication.memory();
        memory.read(&stream, tensor.offset, &mut bytes).unwrap();
        bytes
    };
    let first = subscriber.attach("model", &how).unwrap();
    assert_eq!((first.version(), &bytes(&first)), (1, b"first"));
    std::fs::write(socket.with_file_name("seen"), "").unwrap();
    let newer = subscriber.wait_for_newer(&first, PATIENCE).unwrap();
    assert_eq!(newer, Some(2));
    let second = subscriber.attach("model", &how).unwrap();
    assert_eq!((second.version(), &bytes(&second)), (2, b"other"));
    assert_eq!(&bytes(&first), b"first");
}

/// A handle type that does not work is refused with the driver's reason. A type that works is
/// usable.
fn tries_handle_types(stage: &Stage) {
    Physical::probe_export(&stage.device, FD).unwrap();
    let fabric = Physical::probe_export(&stage.device, HandleTypes::FABRIC);
    println!("fabric handles: {fabric:?}");
    let g = stage.g();
    let types = if fabric.is_ok() {
        FD | HandleTypes::FABRIC
    } else {
        FD
    };
    let made = Physical::builder(&stage.device, g)
        .shareable(types)
        .create();
    let offer = Offer::physical(&made.unwrap()).unwrap().as_fabric();
    let (mut one, mut other) = Channel::pair().unwrap();
    let (given, taken) = std::thread::scope(|scope| {
        let given = scope.spawn(|| one.send(&offer));
        let taken = other.recv(&Attachment::builder(&stage.device));
        (given.join().unwrap(), taken)
    });
    if fabric.is_ok() {
        given.unwrap();
        taken.unwrap().close().unwrap();
    } else {
        assert!(matches!(
            given,
            Err(ShareError::Memory(MemoryError::Export { .. }))
        ));
        assert!(matches!(taken, Err(ShareError::Refused { .. })));
    }
}

fn socket() -> Option<std::path::PathBuf> {
    std::env::var_os(SOCKET).map(Into::into)
}

mod on_host {
    use super::*;

    #[test]
    fn gives() {
        super::gives(&Stage::on_host(), "share::on_host::taker");
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn taker() {
        if let Some(socket) = socket() {
            takes(&Stage::on_host(), &socket);
        }
    }

    #[test]
    fn publishes() {
        super::publishes(&Stage::on_host(), "share::on_host::reader");
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn reader() {
        if let Some(socket) = socket() {
            subscribes(&Stage::on_host(), &socket);
        }
    }

    #[test]
    fn tries_handle_types() {
        super::tries_handle_types(&Stage::on_host());
    }
}

mod on_gpu {
    use super::*;

    #[test]
    fn gives() {
        if let Some(stage) = Stage::on_gpu("share::on_gpu::gives") {
            super::gives(&stage, "share::on_gpu::taker");
        }
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn taker() {
        if let (Some(socket), Some(stage)) = (socket(), Stage::on_gpu("share::on_gpu::taker")) {
            takes(&stage, &socket);
        }
    }

    #[test]
    fn publishes() {
        if let Some(stage) = Stage::on_gpu("share::on_gpu::publishes") {
            super::publishes(&stage, "share::on_gpu::reader");
        }
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn reader() {
        if let (Some(socket), Some(stage)) = (socket(), Stage::on_gpu("share::on_gpu::reader")) {
            subscribes(&stage, &socket);
        }
    }

    #[test]
    fn tries_handle_types() {
        if let Some(stage) = Stage::on_gpu("share::on_gpu::tries_handle_types") {
            super::tries_handle_types(&stage);
        }
    }
}
