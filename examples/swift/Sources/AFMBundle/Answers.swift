import CoreAILanguageModels
import Foundation
import FoundationModels

@Generable
public struct Event {
    @Guide(description: "What takes place")
    public let title: String
    @Guide(description: "When", .anyOf(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]))
    public let day: String
}

/// Answers of a bundle by the FoundationModels framework, which runs its function `main`, without an adapter; or
/// of the folder `adapters/NAME` in a bundle, for an adapter that has functions.
public struct Answers {
    private let model: CoreAILanguageModel

    public init(bundle: URL) async throws {
        model = try await CoreAILanguageModel(resourcesAt: bundle)
    }

    /// Call `text` with each new part of an answer.
    public func stream(_ prompt: String, text: (Substring) -> Void) async throws {
        let session = LanguageModelSession(model: model)
        var count = 0
        for try await snapshot in session.streamResponse(to: prompt) {
            text(snapshot.content.dropFirst(count))
            count = snapshot.content.count
        }
    }

    public func event(in message: String) async throws -> Event {
        let session = LanguageModelSession(model: model)
        return try await session.respond(to: message, generating: Event.self).content
    }
}
