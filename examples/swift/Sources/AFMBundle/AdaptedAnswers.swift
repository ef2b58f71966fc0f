import CoreAI
import Foundation
import Tokenizers

public struct BundleError: Error { public let reason: String }

/// An adapter's arrays (float16) by the names of a function's inputs, out of a file in the bundle's `adapters`.
public func adapterArrays(_ file: URL) throws -> [String: NDArray] {
    let data = try Data(contentsOf: file)
    let start = 8 + data.prefix(8).reversed().reduce(0) { ($0 << 8 | Int($1)) & 0xFFFF_FFFF }
    guard data.count > start, let header = try JSONSerialization.jsonObject(with: data[8..<start]) as? [String: Any]
    else { throw BundleError(reason: "\(file.lastPathComponent) is no safetensors file, or was cut") }
    var arrays: [String: NDArray] = [:]
    for (name, value) in header where name != "__metadata__" {
        guard let entry = value as? [String: Any], entry["dtype"] as? String == "F16",
            let shape = entry["shape"] as? [Int], shape.count == 2, shape.allSatisfy((1..<1 << 24).contains),
            let place = entry["data_offsets"] as? [Int], place.count == 2,
            place.allSatisfy((0...data.count - start).contains), place[1] - place[0] == 2 * shape[0] * shape[1]
        else { throw BundleError(reason: "\(name) in \(file.lastPathComponent) is no float16 array of its size") }
        let numbers = [Float16](unsafeUninitializedCapacity: shape[0] * shape[1]) { buffer, count in
            count = data.copyBytes(to: buffer, from: start + place[0]..<start + place[1]) / 2
        }
        arrays[name] = array(numbers, shape, .float16)
    }
    return arrays
}

/// Greedy answers by the bundle's functions `prompt_N_adapter` and `step_adapter`, which take an adapter as inputs.
public struct AdaptedAnswers {
    private let model: AIModel
    private let tokenizer: any Tokenizer

    public init(bundle: URL) async throws {
        let files = try FileManager.default.contentsOfDirectory(at: bundle, includingPropertiesForKeys: nil)
        guard let asset = files.first(where: { $0.pathExtension == "aimodel" })
        else { throw BundleError(reason: "\(bundle.path) holds no asset") }
        model = try await AIModel(contentsOf: asset, options: SpecializationOptions(preferredComputeUnitKind: .gpu))
        tokenizer = try await AutoTokenizer.from(modelFolder: bundle.appending(path: "tokenizer"))
    }

    /// Answer a prompt; `promptLength` is one of the bundle's, and without `adapter` the base model answers.
    public func answer(
        _ prompt: String, adapter: [String: NDArray] = [:], promptLength: Int = 64, maxTokens: Int = 200
    ) async throws -> String {
        let suffix = adapter.isEmpty ? "" : "_adapter"
        var pending = try tokenizer.applyChatTemplate(messages: [["role": "user", "content": prompt]]).map(Int32.init)
        var keys = try state("keys")
        var values = try state("values")
        let context = keys.shape[3]
        var position = 0
        var answer: [Int] = []
        while answer.count < maxTokens {
            let isStep = pending.count == 1
            guard position + (isStep ? 1 : promptLength) <= context
            else { throw BundleError(reason: "prompt and answer are longer than the context, \(context) tokens") }
            let tokens = Array(pending.prefix(isStep ? 1 : promptLength))
            var inputs = adapter
            inputs["position"] = array([Int32(position)], [1], .int32)
            if isStep {
                inputs["tokens"] = array(tokens, [1, 1], .int32)
            } else {
                let padding = [Int32](repeating: 0, count: promptLength - tokens.count)
                inputs["tokens"] = array(tokens + padding, [1, promptLength], .int32)
                inputs["count"] = array([Int32(tokens.count)], [1], .int32)
            }
            let name = (isStep ? "step" : "prompt_\(promptLength)") + suffix
            guard let function = try model.loadFunction(named: name)
            else { throw BundleError(reason: "the asset has no function \(name)") }
            var states = InferenceFunction.MutableViews()
            states.insert(&keys, for: "keys")
            states.insert(&values, for: "values")
            var outputs = try await function.run(
                inputs: inputs, states: consume states, outputViews: InferenceFunction.MutableViews())
            guard let logits = outputs.remove("logits")?.ndArray
            else { throw BundleError(reason: "\(name) returned no logits") }
            position += tokens.count
            pending.removeFirst(tokens.count)
            guard pending.isEmpty else { continue }
            let token = largest(logits)
            if token == tokenizer.eosTokenId { break }
            answer.append(token)
            pending = [Int32(token)]
        }
        return tokenizer.decode(tokens: answer)
    }

    /// A state of zeros: columns that a token must not see have weight 0, but 0 times NaN is NaN.
    private func state(_ name: String) throws -> NDArray {
        guard let function = model.functionDescriptor(for: "step"),
            case .ndArray(let descriptor) = function.stateDescriptor(of: name)
        else { throw BundleError(reason: "step has no state \(name)") }
        var array = NDArray(descriptor: descriptor)
        array.mutableRawView().withUnsafeMutableBytes { bytes, _, _ in
            _ = memset(bytes, 0, descriptor.minimumByteCount)
        }
        return array
    }
}

private func array<T: BitwiseCopyable>(_ numbers: [T], _ shape: [Int], _ type: NDArray.ScalarType) -> NDArray {
    var array = NDArray(shape: shape, scalarType: type)
    var view = array.mutableView(as: T.self)
    view.copyElements(fromContentsOf: numbers)
    return array
}

/// The index of the largest of logits (1, vocab_size).
private func largest(_ logits: NDArray) -> Int {
    logits.view(as: Float16.self).withUnsafePointer { numbers, shape, strides in
        let (count, stride) = (shape[1], strides[1])
        return (0..<count).max { numbers[$0 * stride] < numbers[$1 * stride] } ?? 0
    }
}
