//! A device that always works.

use cuvmm::Stream;
use cuvmm::driver::model::Backing;

use super::{D0, Rig};

/// Runs `operate` on a thread while streams of its own keep the device at work: the next work begins
/// before the last ends.
pub fn while_the_device_works<B: Backing, T: Send>(
    rig: &Rig<B>,
    operate: impl FnOnce() -> T + Send,
) -> T {
    let [one, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
    let begin = |stream: &Stream| {
        rig.held_kernel(stream, &[], &[]);
    };
    begin(&one);
    std::thread::scope(|scope| {
        let operating = scope.spawn(operate);
        let mut streams = [&one, &other].into_iter().cycle();
        while !operating.is_finished() {
            let (busy, calls) = (streams.next().unwrap(), rig.device.calls().total());
            begin(streams.clone().next().unwrap());
            rig.machine.release_stream(D0, busy.as_raw());
            while rig.device.calls().total() < calls + 8 && !operating.is_finished() {
                std::thread::yield_now();
            }
        }
        rig.machine.release_all_streams(D0);
        operating.join().unwrap()
    })
}
