//! A view of a sequence does not outlive a change of the cache.

use cuvmm::KvCache;
use cuvmm::kv::SequenceId;

fn appended(mut cache: KvCache, id: SequenceId) {
    let keys = cache.view(id).unwrap().key(0).unwrap();
    cache.append(&[(id, 1)]).unwrap();
    println!("{}", keys.address());
}

fn freed(mut cache: KvCache, id: SequenceId) {
    let view = cache.view(id).unwrap();
    cache.free(id).unwrap();
    println!("{}", view.tokens());
}

fn main() {}
