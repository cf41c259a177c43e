//! Weights: loaded as stored in files, and used by candle's layers.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module as _, VarMap};
use cuvmm_candle::Weights;
use cuvmm_candle::error::WeightsError;

use super::rig::{G, bits, numbers, rig};

fn file(folder: &Path, name: &str, tensors: &[(&str, Tensor)]) -> std::path::PathBuf {
    let path = folder.join(name);
    let tensors: HashMap<&str, Tensor> = tensors.iter().cloned().collect();
    candle_core::safetensors::save(&tensors, &path).unwrap();
    path
}

#[test]
fn files_are_read_as_they_lie() {
    let Some(rig) = rig("files_are_read_as_they_lie", 300) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    // Larger than one piece of the read buffer.
    let large = numbers(&[(64 << 20) / 4 + 1000], 1);
    let odd = Tensor::new(&[1u8, 2, 3], &Device::Cpu).unwrap();
    let half = numbers(&[33, 5], 2).to_dtype(DType::BF16).unwrap();
    let empty = numbers(&[0, 5], 1);
    let first = file(
        folder.path(),
        "a",
        &[
            ("odd", odd.clone()),
            ("large", large.clone()),
            ("empty", empty),
        ],
    );
    let second = file(folder.path(), "b", &[("half", half.clone())]);

    let weights = Weights::load(&rig.memory, &[&first, &second], None).unwrap();
    assert_eq!(weights.tensors().len(), 4);
    assert_eq!(
        weights.get("odd").unwrap().to_vec1::<u8>().unwrap(),
        [1, 2, 3]
    );
    assert_eq!(weights.get("empty").unwrap().dims(), [0, 5]);
    let seen = weights.get("large").unwrap();
    assert_eq!(
        seen.to_vec1::<f32>().unwrap(),
        large.to_vec1::<f32>().unwrap()
    );
    let seen = weights.get("half").unwrap();
    assert_eq!(seen.dtype(), DType::BF16);
    let values = |tensor: &Tensor| {
        tensor
            .to_dtype(DType::F32)
            .unwrap()
            .to_vec2::<f32>()
            .unwrap()
    };
    assert_eq!(values(seen), values(&half));
    assert_eq!(
        (rig.stats().blocks, rig.stats().tags.get("weights")),
        (1, Some(&weights.bytes()))
    );
    drop(weights);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));

    // All of one type, as candle itself would have loaded them.
    let weights = Weights::load(&rig.memory, &[&first, &second], Some(DType::F16)).unwrap();
    let expected = large
        .to_device(rig.candle())
        .unwrap()
        .to_dtype(DType::F16)
        .unwrap();
    assert_eq!(bits(weights.get("large").unwrap()), bits(&expected));
    assert_eq!(weights.get("odd").unwrap().dtype(), DType::F16);
    rig.nothing_went_wrong();
}

#[test]
fn files_that_are_wrong_are_refused() {
    let Some(rig) = rig("files_that_are_wrong_are_refused", 40) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let good = file(folder.path(), "good", &[("a", numbers(&[1000], 1))]);
    let bytes = std::fs::read(&good).unwrap();
    let broken = folder.path().join("broken");
    let refused = |bytes: &[u8]| {
        std::fs::write(&broken, bytes).unwrap();
        let error = Weights::load(&rig.memory, &[&broken], None).unwrap_err();
        assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
        assert!(error.to_string().contains("broken"), "{error}");
        error
    };
    refused(&[]);
    refused(&bytes[..7]);
    refused(&bytes[..40]);
    refused(&bytes[..bytes.len() - 1]);
    refused(&[&bytes[..], &[0]].concat());
    refused(&[&u64::MAX.to_le_bytes(), &bytes[8..]].concat());
    refused(&[&bytes[..8], b"[", &bytes[9..]].concat());
    let absent = Weights::load(&rig.memory, &[folder.path().join("absent")], None).unwrap_err();
    assert!(absent.to_string().contains("absent"), "{absent}");
    let twice = Weights::load(&rig.memory, &[&good, &good], None).unwrap_err();
    assert!(
        matches!(&twice, WeightsError::NameTaken { name } if name == "a"),
        "{twice}"
    );
    let large = file(
        folder.path(),
        "large",
        &[("a", numbers(&[41 * (G as usize) / 4], 1))],
    );
    let refused = Weights::load(&rig.memory, &[large], None).unwrap_err();
    assert!(refused.shortage().is_some(), "{refused}");
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}

/// A small model with weights from a seed, moved into a tenant.
#[test]
fn layers_are_made_of_them() {
    let Some(rig) = rig("layers_are_made_of_them", 40) else {
        return;
    };
    let map = VarMap::new();
    let theirs = candle_nn::VarBuilder::from_varmap(&map, DType::F32, rig.candle());
    let build = |vb: candle_nn::VarBuilder<'_>| {
        let embedding = candle_nn::embedding(100, 64, vb.pp("embed")).unwrap();
        let norm = candle_nn::rms_norm(64, 1e-6, vb.pp("norm")).unwrap();
        let out = candle_nn::linear(64, 100, vb.pp("out")).unwrap();
        move |tokens: &Tensor| {
            let hidden = norm.forward(&embedding.forward(tokens).unwrap()).unwrap();
            out.forward(&hidden).unwrap()
        }
    };
    let theirs = build(theirs);
    let vars = map.data().lock().unwrap();
    let tensors = vars.iter().map(|(name, var)| (name, var.as_tensor()));
    let weights = Weights::from_tensors(&rig.memory, tensors).unwrap();
    assert_eq!(weights.tensors().len(), 4);
    let ours = build(weights.var_builder(DType::F32));
    let tokens = Tensor::new(&[[1u32, 5, 99]], rig.candle()).unwrap();
    assert_eq!(bits(&ours(&tokens)), bits(&theirs(&tokens)));

    // The model alone keeps the weights alive.
    let bytes = weights.bytes();
    drop(weights);
    assert_eq!(rig.gpu.sweep(), bytes);
    assert_eq!(bits(&ours(&tokens)), bits(&theirs(&tokens)));
    drop(ours);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}

#[test]
fn a_builder_says_what_is_missing() {
    let Some(rig) = rig("a_builder_says_what_is_missing", 8) else {
        return;
    };
    let mut weights = Weights::new(&rig.memory, 512).unwrap();
    weights.insert("a", &numbers(&[4, 4], 1)).unwrap();
    let taken = weights.insert("a", &numbers(&[4], 1)).unwrap_err();
    assert!(matches!(taken, WeightsError::NameTaken { .. }), "{taken}");
    weights.insert("b", &numbers(&[64], 2)).unwrap();
    let full = weights.insert("c", &numbers(&[1], 2)).unwrap_err();
    assert!(
        matches!(&full, WeightsError::Tensor { name, .. } if name == "c"),
        "{full}"
    );
    let vb = weights.var_builder(DType::F32);
    assert!(vb.contains_tensor("a") && !vb.contains_tensor("c"));
    assert!(vb.get((4, 5), "a").is_err());
    assert!(vb.get(1, "c").is_err());
    let a = vb.get((4, 4), "a").unwrap();
    assert_eq!(
        a.to_vec2::<f32>().unwrap(),
        numbers(&[4, 4], 1).to_vec2::<f32>().unwrap()
    );
    rig.nothing_went_wrong();
}

/// candle moves elements of this type to no GPU: the space stays free for the next tensor.
#[test]
fn weights_that_cannot_be_copied_take_no_room() {
    let Some(rig) = rig("weights_that_cannot_be_copied_take_no_room", 8) else {
        return;
    };
    let mut weights = Weights::new(&rig.memory, 512).unwrap();
    weights.insert("a", &numbers(&[10], 1)).unwrap();
    let odd = Tensor::from_raw_buffer(&[1; 200], DType::F8E8M0, &[200], &Device::Cpu).unwrap();
    for _ in 0..3 {
        let refused = weights.insert("b", &odd).unwrap_err();
        assert!(
            matches!(&refused, WeightsError::Tensor { name, .. } if name == "b"),
            "{refused}"
        );
        assert!(refused.shortage().is_none(), "{refused}");
        assert_eq!((weights.bytes(), weights.tensors().len()), (40, 1));
    }
    weights.insert("b", &numbers(&[64], 2)).unwrap();
    assert_eq!(weights.bytes(), 512);
    assert_eq!(
        bits(weights.get("b").unwrap()),
        bits(&numbers(&[64], 2).to_device(rig.candle()).unwrap())
    );
    drop(weights);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}
