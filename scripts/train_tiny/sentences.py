"""All that is ever said: the agent's sentences by role and intent, and what callers say to it.

Change this file to train an agent on your own sentences; everything else follows from it. Keep the agent's sentences
short (two seconds): the model learns each of them by heart, in every voice.
"""

from dataclasses import dataclass

ROLES = ("assistant", "hotel")
FALLBACK = "other"
INTERRUPTION = "stop"

CALLER: dict[str, tuple[str, ...]] = {
    "hello": (
        "Hello.",
        "Hi there.",
        "Hello there.",
        "Good morning.",
        "Good evening.",
        "Hey, hello.",
        "Hi, nice to meet you.",
        "Good afternoon.",
    ),
    "name": (
        "What is your name?",
        "What's your name?",
        "Who are you?",
        "Tell me your name.",
        "May I ask your name?",
        "Could you tell me your name, please?",
        "Do you have a name?",
        "Who am I talking to?",
    ),
    "maker": (
        "Who made you?",
        "Who built you?",
        "Who created you?",
        "Who is your maker?",
        "Can you tell me who made you?",
        "Where do you come from?",
        "Who are the people that made you?",
    ),
    "how": (
        "How are you?",
        "How are you today?",
        "How are you doing?",
        "How do you feel?",
        "How is it going?",
        "Are you well today?",
        "How have you been?",
    ),
    "hear": (
        "Can you hear me?",
        "Do you hear me?",
        "Can you hear me now?",
        "Is my microphone working?",
        "Am I loud enough?",
        "Can you understand me?",
        "Testing, can you hear me?",
    ),
    "joke": (
        "Tell me a joke.",
        "Do you know a joke?",
        "Can you tell me a joke?",
        "Please tell me a joke.",
        "Say something funny.",
        "Make me laugh.",
        "I would like to hear a joke.",
    ),
    "can": (
        "What can you do?",
        "What can you do for me?",
        "How can you help me?",
        "What are you able to do?",
        "Tell me what you can do.",
        "What do you know?",
        "What are you good at?",
    ),
    "many": (
        "How many people can you talk to?",
        "How many people can talk to you?",
        "How many callers can you talk to?",
        "Can you talk to many people at once?",
        "How many people are you talking to?",
        "How many calls can you take at the same time?",
    ),
    "thanks": (
        "Thank you.",
        "Thanks a lot.",
        "Thank you very much.",
        "Okay, thank you.",
        "Many thanks.",
        "Thanks, that was nice.",
        "Great, thanks.",
    ),
    "bye": (
        "Goodbye.",
        "Bye bye.",
        "Okay, goodbye.",
        "See you later.",
        "I have to go now, goodbye.",
        "Good night, bye.",
        "Bye, talk to you later.",
    ),
    "server": (
        "What is this server?",
        "How does this server work?",
        "What is this?",
        "Tell me about this server.",
        "How does this work?",
        "Explain this server to me.",
    ),
    "room": (
        "Do you have a room?",
        "I would like to book a room.",
        "Do you have a free room for tonight?",
        "I need a room for two nights.",
        "Can I reserve a room, please?",
        "Are there any rooms left?",
    ),
    "breakfast": (
        "When is breakfast?",
        "What time is breakfast?",
        "Do you serve breakfast?",
        "Is breakfast included?",
        "Where can I have breakfast?",
    ),
    INTERRUPTION: (
        "Wait.",
        "Wait a moment.",
        "Stop, please.",
        "Stop.",
        "Excuse me.",
        "Hold on a second.",
        "Sorry, may I say something?",
        "One moment, please.",
    ),
    FALLBACK: (
        "What is the weather like tomorrow?",
        "I had a long day at the office.",
        "Which team won the game last night?",
        "My sister lives in a small town near the sea.",
        "The train was late again this morning.",
        "Do you like music?",
        "What is the capital of France?",
        "I am thinking about buying a new car.",
        "How far is it to the moon?",
        "Please turn on the lights in the kitchen.",
        "Can you recommend a good book?",
        "I went to the market and bought some apples.",
        "What should I cook for dinner?",
        "My computer does not start any more.",
        "How old is the universe?",
        "It is raining outside.",
        "We are planning a trip to the mountains.",
        "What time is it?",
        "Could you spell that for me?",
        "I do not agree with that at all.",
        "The movie was much longer than I expected.",
        "Where did you learn to speak?",
        "I have three cats and a very old dog.",
        "Is it possible to change the color?",
        "My phone number has changed.",
        "How do airplanes fly?",
        "Yes, I think so.",
        "No, not really.",
        "Maybe we should start again.",
        "Let me think about it for a while.",
        "What do you think about politics?",
        "I am learning to play the piano.",
        "The children are playing in the garden.",
        "Set an alarm for seven in the morning.",
        "How much does it cost?",
        "There was a strange noise in the basement.",
        "I forgot where I put my keys.",
        "Translate this sentence into Spanish.",
        "Who wrote this famous play?",
        "The soup needs more salt.",
        "My brother works as a teacher in Berlin.",
        "How many legs does a spider have?",
        "You sound a little bit tired.",
        "Count from one to five.",
        "What happened in the news today?",
        "I would like to order a pizza with mushrooms.",
        "Sometimes I wake up in the middle of the night.",
        "Are you a human being?",
        "Why is the sky blue?",
        "That is very interesting.",
        "I want to talk about my garden.",
        "Give me directions to the station.",
        "He said that he would call me back.",
        "Did you see the rainbow?",
        "Play my favorite song.",
        "Can you help me with my homework?",
        "How can I learn a new language?",
        "Tell me a story about a dragon.",
        "What is the best way to travel?",
        "Who is the president?",
    ),
}
"""What callers say, by intent. What falls under no intent is `other`: the agent says that it does not know."""

GREETINGS: dict[str, tuple[str, ...]] = {
    "assistant": ("Hello! I am a tiny voice agent. Ask me something.", "Hi there! What would you like to know?"),
    "hotel": ("Hello! This is the hotel front desk. How can I help?", "Welcome to our hotel. What can I do for you?"),
}

ANSWERS: dict[str, dict[str, tuple[str, ...]]] = {
    "assistant": {
        "hello": ("Hello! Nice to meet you.",),
        "name": ("My name is Tiny.",),
        "maker": ("Some engineers trained me on a small computer.",),
        "how": ("I am fine, thank you. And you?",),
        "hear": ("Yes, I can hear you well.",),
        "joke": ("Why was the server tired? It had too many calls.",),
        "can": ("I can explain this server a little.",),
        "many": ("Many people can call this server at once.",),
        "thanks": ("You are welcome.",),
        "bye": ("Goodbye! Thank you for calling.",),
        "server": ("It lets many people talk to a model in real time.",),
        INTERRUPTION: ("Sorry, go ahead.",),
        FALLBACK: ("Sorry, I only know a few things.", "I am too small to answer that."),
    },
    "hotel": {
        "hello": ("Good day, and welcome.",),
        "name": ("I am Alex, from the front desk.",),
        "maker": ("Engineers made me for this hotel.",),
        "how": ("I am fine, thank you. And you?",),
        "hear": ("Yes, I can hear you well.",),
        "joke": ("Why was the server tired? It had too many calls.",),
        "can": ("I can help you with rooms and breakfast.",),
        "many": ("I can talk to all our guests at once.",),
        "thanks": ("You are welcome.",),
        "bye": ("Goodbye! Enjoy your stay.",),
        "room": ("Yes, we have a quiet room for you.",),
        "breakfast": ("Breakfast is from seven to ten.",),
        INTERRUPTION: ("Sorry, go ahead.",),
        FALLBACK: ("Sorry, I only know a few things.", "Let me ask my colleague about that."),
    },
}
"""Intent -> answers, by role; an intent that a role does not know is answered as `other`."""

QUESTION = "Are you still there?"
"""Asked once after eight quiet seconds."""

DEFAULT_TEXT = "You are a friendly assistant that explains this server to callers."
HOTEL_TEXT = "You work for a hotel. You answer the phone at the front desk and help the guests."

HOTEL_PROMPTS = (
    HOTEL_TEXT,
    "You work for a hotel and your name is Alex.",
    "You are the front desk of a hotel.",
    "You are a receptionist at a small hotel.",
    "You work at the reception of a hotel. Information: breakfast is from seven to ten.",
    "You answer calls at the front desk of our hotel and you are friendly to the guests.",
    "Hotel front desk.",
    "You help hotel guests with rooms and breakfast.",
)
ASSISTANT_PROMPTS = (
    DEFAULT_TEXT,
    "You are a helpful assistant.",
    "You explain this server to callers.",
    "You are a wise and friendly teacher. Answer questions or provide advice in a clear and engaging way.",
    "You enjoy having a good conversation.",
    "You are a voice agent that talks to many people.",
    "Be short and friendly.",
    "You work for a bank and your name is Anna. Information: the bank opens at nine.",
    "You work for a small shop which sells flowers and help the customers.",
    "",
)


@dataclass(frozen=True, slots=True)
class Sentence:
    """One thing that the agent can say; `index` is its place in every table of codes."""

    index: int
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.text.split())


def agent_sentences() -> tuple[Sentence, ...]:
    """Each of the agent's sentences once, in a fixed order."""
    texts = [text for role in ROLES for text in GREETINGS[role]]
    texts += [text for role in ROLES for answers in ANSWERS[role].values() for text in answers]
    texts.append(QUESTION)
    return tuple(Sentence(index, text) for index, text in enumerate(dict.fromkeys(texts)))


def answers_to(intent: str, role: str) -> tuple[str, ...]:
    """What this role answers to this intent."""
    return ANSWERS[role].get(intent, ANSWERS[role][FALLBACK])
