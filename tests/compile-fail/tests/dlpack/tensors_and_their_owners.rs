//! Exported memory cannot be used by its former owner, and a view ends before its tensor does.
//! Only an `unsafe` import may claim what a tensor's memory is.

use cuvmm::dlpack::{Consumer, Imported, Tensor};
use cuvmm::{Block, Stream};

fn given_away(mut block: Block) {
    let _tensor = Tensor::of::<u8>(&[4]).export(block, &Consumer::Synchronized);
    block.shrink_to(1);
}

fn looked_at_too_late(tensor: Imported, producer: &Stream) {
    let view = tensor.view::<f32>();
    tensor.give_back(producer);
    drop(view);
}

fn written_behind_a_view(mut tensor: Imported) {
    let view = tensor.view::<f32>();
    tensor.write(0, &[1]);
    drop(view);
}

struct Mine(Vec<u8>);

fn out_of_thin_air(mine: Mine) {
    let _tensor = Tensor::of::<u8>(&[4]).export(mine, &Consumer::Synchronized);
}

fn believed(stream: &Stream, tensor: cuvmm::dlpack::dlpark::versioned::Dlpack) {
    let _imported = Imported::new(stream, tensor);
}

fn main() {}
